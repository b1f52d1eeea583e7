"""Document lengths of a real corpus, as MagiAttention's benchmark has them."""

# Upper edge of each bin, tokens -> percentage of documents up to it; evenly inside a bin.
HISTOGRAM = {
    10: 0.22, 50: 3.13, 100: 8.33, 200: 18.56, 500: 46.75, 1024: 71.38, 2048: 87.03, 4096: 94.37,
    8192: 97.42, 16384: 98.71, 32768: 99.56, 65536: 99.70, 131072: 99.86, 196608: 100.0,
}  # fmt: skip
