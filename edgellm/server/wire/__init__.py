"""What goes over the wire: one msgspec struct for each body that a client may send."""
