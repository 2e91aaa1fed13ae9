"""Public training programs, each planned unedited and trained with the lines that its plan prints. See docs/gallery.md."""
