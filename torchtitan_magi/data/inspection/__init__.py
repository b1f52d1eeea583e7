"""What a data set becomes: records as tokens with what is learned, lengths, and what looks wrong."""
