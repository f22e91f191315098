"""Models on disk and on the hub: names, downloads, checks."""
