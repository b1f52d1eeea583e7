"""Log-probabilities of target tokens, preference losses, and means over documents."""

IGNORE_INDEX = -100  # the label of a token that has none, as in torch's cross_entropy
