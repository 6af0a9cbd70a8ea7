"""Who owns, lends, borrows and holds how much."""
