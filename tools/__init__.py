"""Programs for those who work on the project; nothing that is installed imports them."""
