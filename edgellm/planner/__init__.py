"""From a model's shape and the devices to a plan: bytes, speed, reasons."""
