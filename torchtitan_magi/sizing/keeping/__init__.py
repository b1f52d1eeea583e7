"""What layers keep for their backward, compute again or move to the host's memory: kinds, and which of them to take."""
