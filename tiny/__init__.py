"""The embedded tiny world, in reading order: world, tokenizer, muon, pretrain, measure, build; smollm2 converts the small real model."""
