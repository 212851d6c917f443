"""One file for each command of `tensorhub`. `cli.main` alone imports them."""
