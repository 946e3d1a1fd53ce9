"""Set up a federation of real machines: folders, certificates, start scripts and the registration of nodes."""
