"""A Flower app in the shape of quickstart-pytorch, on digits or Fashion-MNIST."""
