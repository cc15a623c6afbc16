"""Thin Ray shells around the pure rooms: unwrap references, call pure code, wrap references."""
