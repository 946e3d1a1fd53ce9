"""What clients and generators on one GPU share: graphs captured one at a time, and streams."""
