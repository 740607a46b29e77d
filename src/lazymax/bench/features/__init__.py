"""`lazymax bench --suite features`: what each feature costs beside the plain kernel."""
