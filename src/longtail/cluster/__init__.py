"""Where does it run? Workers that loop over quanta of all their pipelines, and the clusters that hold them."""
