"""`lazymax bench`: the forward beside other libraries on a user's GPU. No time without a correct result."""
