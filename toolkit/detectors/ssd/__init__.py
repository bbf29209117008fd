"""SSD and SSDLite: model and criterion."""
