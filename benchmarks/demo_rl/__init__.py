"""The trainer of tensorhub.demo.rl learns undisturbed and with kills: do both learn the same? Its figures are owed."""
