"""One file per architecture, named by its GGUF `general.architecture`."""
