"""What users hold in their hands: records joined with the writers that show them."""
