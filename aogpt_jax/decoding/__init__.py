"""How fast and how well the samplers draw: measurements of trained models, and a page of them."""
