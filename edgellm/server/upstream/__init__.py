"""Other servers behind this one's port."""
