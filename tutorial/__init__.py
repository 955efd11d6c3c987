"""Short lessons to run and read; their pages are docs/tutorial/*.md."""
