"""From pairwise latency and bandwidth to a mesh: read, discover the axes, regress each of them, say how sure it is."""

from steptime.lab.calibrate.mesh import cluster_file as cluster_file
from steptime.lab.calibrate.mesh.discover import discover as discover
from steptime.lab.calibrate.mesh.links import Links as Links
from steptime.lab.calibrate.mesh.links import Quantity as Quantity
from steptime.lab.calibrate.mesh.read import read_links as read_links
