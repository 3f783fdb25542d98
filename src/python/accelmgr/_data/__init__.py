"""The elements of a dataset: how they are read, fed, and put into the rows of a batch."""
