// Curves as an SVG file, without a library.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace k3 {

struct LinePlot {
  struct Curve {
    std::string name;
    std::vector<std::pair<double, double>> points;  // those that are not finite are left out
    bool bold = false;
  };
  std::string title, x_label, y_label;
  std::vector<Curve> curves;
};

/// A picture of 720 x 420 with round ticks and a legend. More than 400 points of a curve are drawn
/// as the means of 400 stretches. Empty curves leave an empty frame.
std::string LinePlotSvg(const LinePlot& plot);

}  // namespace k3
