"""Write again what documents hold that is generated from the code: `make docs`."""
