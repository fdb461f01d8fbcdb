"""Everything about text: templates, detokeniser, stop strings. Pure, and restartable anywhere."""
