"""From corpora to batches: readers, tokenizers, token stores, packing, sample order, batches."""
