"""The SDK of TensorHub: what trainers and engines import."""
