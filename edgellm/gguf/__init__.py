"""GGUF files: header, metadata and tensor table, and the shape of the model they describe."""
