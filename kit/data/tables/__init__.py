"""Event tables: rows of a database or of Parquet files, read as Arrow batches, in query chunks that split no entity."""
