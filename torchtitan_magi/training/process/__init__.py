"""The process of a rank: its launcher, its folders, its end."""
