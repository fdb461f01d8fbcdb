"""Expert streaming: experts stay on the SSD, and a bounded number of slots holds those in use."""
