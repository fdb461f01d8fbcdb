"""Skills: each is a function that draws one exchange with a known right answer."""
