"""The drop-ins, one file a model, named after upstream's."""
