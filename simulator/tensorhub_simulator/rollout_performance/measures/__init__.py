"""What came of a run: its report with tails, ages and a timeline, and the limit that it stays below. Pure.

`job` fills it, and `comparison` shows it. It imports `config` and `models`.

Seams: `ages`, `limits`, `report`, `tails`, `timeline`.
"""
