"""A Flower app in the shape of quickstart-pytorch, with FedEAS added."""
