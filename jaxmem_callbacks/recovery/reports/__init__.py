"""A failure explained: a verdict enters; holders, predictions and remedies leave as one report, without secrets."""
