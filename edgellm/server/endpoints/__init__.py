"""One file an endpoint family: wire struct in, events out."""
