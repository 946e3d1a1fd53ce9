"""The probe of `fedeas_flwr.launch.resources` with one epoch instead of ten, for a test of its process."""

from fedeas_flwr.launch import resources

if __name__ == "__main__":
    resources._EPOCHS = 1
    resources.main()
