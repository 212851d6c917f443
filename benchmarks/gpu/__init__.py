"""What TensorHub does on a GPU, beside what the GPU and its bus can do: `python -m benchmarks.gpu`."""
