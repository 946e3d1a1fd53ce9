"""Tables and figures, from run directories alone: nothing here trains, generates or imports torch or flwr."""
