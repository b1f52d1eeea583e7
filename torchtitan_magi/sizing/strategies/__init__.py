"""One layer of attention over packs, under our plan and the strategies that it replaces."""
