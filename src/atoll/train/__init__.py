"""The reference trainer: an application of the library, which never imports it."""
