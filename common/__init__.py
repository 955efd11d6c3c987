"""Code that all five scripts share: data, model, meters and checkpoint."""
