"""Everything a trainer needs that is the same for every version of torchtitan; nothing here imports torchtitan."""
