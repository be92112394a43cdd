"""A complete example: reading lines of printed text with PP-OCRv5 over partitioned Parquet files."""
