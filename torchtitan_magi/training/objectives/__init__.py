"""What is learned: objectives, references and adapters, validation."""
