"""Programs for the makers of headrace; none of them is part of what is installed."""
