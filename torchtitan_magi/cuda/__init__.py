"""The driver, the compiler and launches."""
