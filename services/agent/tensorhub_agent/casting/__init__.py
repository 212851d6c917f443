"""Casts of tensors in host memory, bit for bit as torch's: values (`values.py`) and fp8 with scales (`fp8.py`).

Kernels work on numpy views and know no segments, pieces or plans. `floats.py` is the slow rule that says what is right,
`tables.py` what is looked up, `kernels.py` what runs over a block that fits into the core's cache.
"""
