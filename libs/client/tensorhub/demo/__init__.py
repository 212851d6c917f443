"""What `tensorhub demo` shows: a small model learns here, and engines generate with what it learnt so far."""
