"""Records -> tokens and what is learned of them; tokens are made once and kept."""
